"""Draft heads for a frozen model, trained from text by `tandem speculate train`."""
