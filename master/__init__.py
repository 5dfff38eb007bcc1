"""The user's side: tokenizer, embedding, head, sampler, sequences, planner, cluster, commands."""
