"""The language of score_mod and mask_mod: parsed with an allow-list, differentiated, printed as text."""
