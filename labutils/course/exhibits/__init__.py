"""Things to play with, in a notebook or a page, without kernel or network."""

import pkgutil

import lazy_loader

modules = {module.name for module in pkgutil.iter_modules(__path__)}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, modules)
