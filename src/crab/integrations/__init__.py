"""Plug-ins by which other agent frameworks use Crab: one file per framework, each loaded only by who has that framework.

`box` is what they share; it knows no framework. How to use them: docs/integrations.md.
"""
