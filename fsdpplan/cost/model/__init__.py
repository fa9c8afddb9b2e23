"""Model: parameters, useful FLOPs and FSDP units of a decoder, and how ranks share them."""
