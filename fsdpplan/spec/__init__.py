"""The five nouns as frozen values: no input or output here."""
