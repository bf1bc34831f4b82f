"""The families that draft a block of tokens in one forward, all made of `dflash`."""
