"""Fair comparison of training methods: equal trials, paired seeds, one predefined endpoint."""
