// Requests to the server: /v1/models, /house, and streamed answers.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const SENDABLE = /^[\x20-\x7e]*$/; // characters that a header can carry

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

export async function getJson(path, key, signal) {
  checkKey(key);
  const response = await fetch(path, { headers: headers(key), signal, cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// Yields {text} and {thought} as they come, and {reason, timings} at the end.
export async function* answer(messages, settings, signal) {
  checkKey(settings.key);
  const body = { messages, stream: true };
  if (settings.temperature !== "") body.temperature = Number(settings.temperature);
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(settings.key) },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    yield* pieces(JSON.parse(data));
  }
}

function* pieces(chunk) {
  if (chunk.error) throw new Refused(0, chunk.error.message);
  const choice = chunk.choices?.[0];
  if (!choice) return;
  if (choice.delta.reasoning_content) yield { thought: choice.delta.reasoning_content };
  if (choice.delta.content) yield { text: choice.delta.content };
  if (choice.finish_reason) yield { reason: choice.finish_reason, timings: chunk.timings };
}

// Yields the data of server-sent events, without comments.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

// Refuses a key that no header can carry, like a wrong one.
function checkKey(key) {
  if (!SENDABLE.test(key)) throw new Refused(401, "The key has characters that an API key cannot have.");
}

async function refusal(response) {
  const said = await response.json().catch(() => null);
  return new Refused(response.status, said?.error?.message ?? `The server answered ${response.status}.`);
}
