"""What a reader and a class meet: a notebook's first cell, guesses, exercises, exhibits, the
command line, and notebooks executed, copied for students, graded.
"""

import pkgutil

import lazy_loader

modules = {module.name for module in pkgutil.iter_modules(__path__)}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, modules)
