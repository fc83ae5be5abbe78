"""FX passes: they rewrite latent attention in a compiled graph into the ops of `mla_ops`."""
