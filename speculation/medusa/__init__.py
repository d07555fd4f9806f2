"""Medusa: heads on the target's last hidden state, each for one token further ahead (Cai et al. 2024)."""
