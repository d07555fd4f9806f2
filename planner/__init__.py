"""What a cluster would do with a recorded load: `tandem profile` measures, `tandem plan` simulates."""
