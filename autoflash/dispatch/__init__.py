"""From a call to the kernel that runs it."""
