"""The nouns that everything else speaks: small frozen types, no I/O, no torch."""
