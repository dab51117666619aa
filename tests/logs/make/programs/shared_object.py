import ctypes

ctypes.CDLL("libcudart.so.12")
