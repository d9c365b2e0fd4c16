"""Kernels of the Hopper family in plain Python: roles are threads, and barriers count as they do on the device."""
