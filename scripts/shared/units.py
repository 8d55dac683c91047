"""Units: memory is counted in powers of two, messages and rates in powers of ten."""

MIB = 2**20
GIB = 2**30
MB = 10**6
GB = 10**9
