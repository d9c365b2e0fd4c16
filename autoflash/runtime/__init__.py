"""From text to a loaded kernel, and its launch."""
