"""How the NPU providers reach the vendor's functions; nothing is imported before a call."""
