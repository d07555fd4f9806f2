"""Load generator, other serving systems to compare with, and measurements of Tandem."""
