"""Backends of `mla_ops`, each imported only when it is chosen."""
