"""Generation of answers: admission of requests, pages, steps, sampling, and the end of an answer."""
