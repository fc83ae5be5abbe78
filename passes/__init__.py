"""FX passes that rewrite multi-head latent attention in a compiled graph into the ops of `mla_ops`."""
