"""Images: the read-only root file systems that sandboxes start from.

`ImageStore` keeps them in the pool. There is one module for each kind of source: `debian`, `oci`, `folder`, `tar`,
`host`.
"""

from crab.sandbox.images.source import FORMS, ImageConfig, Progress, UnpackLimits
from crab.sandbox.images.store import ImageStore

__all__ = ["FORMS", "ImageConfig", "ImageStore", "Progress", "UnpackLimits"]
