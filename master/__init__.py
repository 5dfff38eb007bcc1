"""The master, the user's side: commands, tokenizer, embedding, head, sampler, engine, planning, and the cluster."""
