"""From a structure to the text of a kernel."""
