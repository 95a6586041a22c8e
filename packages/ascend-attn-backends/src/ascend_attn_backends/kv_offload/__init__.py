"""Keys of sparse latent attention in host memory, fetched by blocks of chosen keys."""

from .offload import OffloadCounters, SelectedKvOffload
from .pool import OffloadCapacityError
from .store import HostKvStore

__all__ = ["HostKvStore", "OffloadCapacityError", "OffloadCounters", "SelectedKvOffload"]
