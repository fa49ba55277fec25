"""Selection: score a pool against a target, choose records and write the results."""
