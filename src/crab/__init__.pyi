from crab import errors as errors
from crab import model as model
from crab.sdk.aio import AsyncHost as AsyncHost
from crab.sdk.aio import AsyncProcess as AsyncProcess
from crab.sdk.aio import AsyncSandbox as AsyncSandbox
from crab.sdk.aio import aconnect as aconnect
from crab.sdk.sync import Host as Host
from crab.sdk.sync import Process as Process
from crab.sdk.sync import Sandbox as Sandbox
from crab.sdk.sync import connect as connect
from crab.sdk.words import CommandFailed as CommandFailed

__all__: list[str]
__version__: str
