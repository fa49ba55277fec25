"""Every durable call failed, killed or torn; power cut; races, tampering, bad input, mutations."""
