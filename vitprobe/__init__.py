"""vitprobe: how does this vision network work?

Train vision transformers and their convolutional relatives, probe any PyTorch vision model, read the results as
plain xarray datasets.
"""

import lazy_loader

# Rooms load when they are first used: reading and drawing results needs no torch. What there is stands in the stub.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
