"""Native kernels for CPUs: C++ that is compiled when it is first used."""
