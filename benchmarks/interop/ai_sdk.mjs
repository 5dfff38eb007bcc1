// The AI SDK: its providers for OpenAI (by responses, its default, and by chat completions), for servers of OpenAI's
// form, and for Anthropic. `node ai_sdk.mjs PROVIDER URL KEY MODEL` prints JSON as benchmarks.interop.checks does.

import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

// The packages lie in the folder that it is run in.
const found = createRequire(join(process.cwd(), "package.json"));
const load = (name) => import(pathToFileURL(found.resolve(name)));
const { APICallError, Output, embedMany, generateText, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { z } = await load("zod");

const [provider, url, key, name] = process.argv.slice(2);
const TEXT = "What is the capital of France? Answer in one word.";
const asked = { temperature: 0, maxOutputTokens: 160, maxRetries: 0 };

function make(apiKey) {
  const [api, anthropic] = [{ baseURL: `${url}/v1`, apiKey }, { baseURL: `${url}/v1`, apiKey }];
  if (provider === "openai") return createOpenAI(api);
  if (provider === "compatible") {
    return createOpenAICompatible({ name: "tpi", supportsStructuredOutputs: true, includeUsage: true, ...api });
  }
  return createAnthropic(anthropic);
}

const made = make(key);
const forms = provider === "openai" ? [made.responses, made.chat] : [made];

function expect(holds, said) {
  if (!holds) throw new Error(`not as expected: ${JSON.stringify(said)}`);
}

async function refused(call, status, word) {
  try {
    await call();
  } catch (error) {
    expect(APICallError.isInstance(error), String(error));
    expect(error.statusCode === status && error.message.includes(word), [error.statusCode, error.message]);
    return;
  }
  throw new Error(`no error of status ${status} came`);
}

const checks = {
  async plain() {
    for (const form of forms) {
      const { text, usage } = await generateText({ model: form(name), prompt: TEXT, ...asked });
      expect(text.includes("Paris") && usage.outputTokens > 0, [text, usage]);
    }
  },
  async stream() {
    for (const form of forms) {
      const result = streamText({ model: form(name), prompt: TEXT, onError: () => {}, ...asked });
      let text = "";
      for await (const part of result.textStream) text += part;
      expect(text.includes("Paris") && (await result.usage).outputTokens > 0, text);
    }
  },
  // A call in the first step; the second goes on from its result without tools.
  async tools() {
    const weather = tool({
      description: "The weather of a city.",
      inputSchema: z.object({ city: z.string().max(20) }),
      execute: async () => "It is sunny, 21 degrees.",
    });
    const step = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
    for (const form of forms) {
      const common = { model: form(name), prompt: "What is the weather in Paris?", tools: { weather }, ...asked };
      const { steps, text } = await generateText({ ...common, prepareStep: step, stopWhen: stepCountIs(2) });
      expect(steps[0].toolResults.length > 0 && text, steps.map((one) => one.content));
      const streamed = streamText({ ...common, prepareStep: step, stopWhen: stepCountIs(2), onError: () => {} });
      expect((await streamed.steps)[0].toolResults.length > 0 && (await streamed.text), "a stream");
    }
  },
  async schema() {
    const schema = z.object({ city: z.string().max(20), days: z.number().int().min(1).max(9) });
    for (const form of forms) {
      const { output } = await generateText({
        model: form(name), prompt: TEXT, output: Output.object({ schema }), ...asked,
      });
      expect(output.days >= 1, output);
    }
  },
  async error() {
    for (const form of forms) {
      const hot = provider === "anthropic" ? { topK: -5, temperature: undefined } : { temperature: 9 };
      const word = provider === "anthropic" ? "top_k" : "temperature";
      await refused(() => generateText({ model: form(name), prompt: TEXT, ...asked, ...hot }), 400, word);
      await refused(() => generateText({ model: form("gpt-9"), prompt: TEXT, ...asked }), 404, "gpt-9");
    }
    const wrong = make("wrong");
    await refused(() => generateText({ model: wrong(name), prompt: TEXT, ...asked }), 401, "key");
  },
};
if (provider !== "anthropic") {
  checks.embeddings = async () => {
    const model = made.textEmbeddingModel?.(name) ?? made.embedding(name);
    const { embeddings } = await embedMany({ model, values: ["one", "two"], maxRetries: 0 });
    expect(embeddings.length === 2 && embeddings[0].length > 100, embeddings.length);
  };
}
if (provider === "openai") {
  checks.responses = async () => {
    const tools = { search: made.tools.webSearch() };
    const { text } = await generateText({ model: made(name), prompt: TEXT, tools, ...asked });
    expect(text, "beside a tool that is left out");
  };
}

const said = {};
for (const [check, run] of Object.entries(checks)) {
  try {
    await run();
    said[check] = "";
  } catch (error) {
    said[check] = `${error.name}: ${error.message}`.slice(0, 300);
  }
}
console.log(JSON.stringify(said));
