"""Rolling out: who decides beside, before or in place of the policy, without a restart."""
