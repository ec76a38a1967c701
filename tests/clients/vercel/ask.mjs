// Asks a server by one provider of Vercel's AI SDK and prints what came back as JSON: node ask.mjs URL MODEL PROVIDER
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, provider] = process.argv.slice(2);
const options = { name: "headrace", baseURL: `${url}/v1`, apiKey: "none" };
const models = {
  compatible: () => createOpenAICompatible({ ...options, supportsStructuredOutputs: true }).chatModel(name),
  responses: () => createOpenAI(options).responses(name),
  chat: () => createOpenAI(options).chat(name),
  messages: () => createAnthropic(options)(name),
};
const asked = { model: models[provider](), maxRetries: 0 };

const whole = await generateText({ ...asked, prompt: "Say hello.", maxOutputTokens: 16 });
const stream = streamText({ ...asked, prompt: "Say hello.", maxOutputTokens: 16, onError: ({ error }) => { throw error; } });
let pieces = 0;
for await (const part of stream.fullStream) pieces += part.type === "text-delta" || part.type === "reasoning-delta";

const weather = tool({
  description: "The weather in a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `-3 in ${city}`,
});
const call = await generateText({
  ...asked, prompt: "How is the weather?", tools: { weather }, toolChoice: { type: "tool", toolName: "weather" }, maxOutputTokens: 200,
});
const typed = await generateText({
  ...asked, prompt: "Name a place.", maxOutputTokens: 400,
  output: Output.object({ schema: z.object({ city: z.string(), size: z.number().int() }) }),
});

console.log(JSON.stringify({
  text: whole.text + (whole.reasoningText ?? ""),
  finish: whole.finishReason,
  tokens: whole.usage.outputTokens,
  pieces,
  tools: call.toolCalls.map((one) => [one.toolName, Object.keys(one.input)]),
  results: call.toolResults.length,
  typed: typed.output,
}));
