"""Mosaic GPU kernels, one file each. Nothing here is imported unless a kernel is asked for."""
