"""What several features need of Megatron, each module one named thing; no feature is declared here."""
