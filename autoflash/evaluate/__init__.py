"""Is a kernel right, and how fast is it?"""
