// Vercel's `ai` with its provider for servers like OpenAI's: text, a stream, an object and a tool.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
    name: "tandem",
    baseURL: `${process.argv[2]}/v1`,
    apiKey: "none",
    supportsStructuredOutputs: true,
});
const model = provider("model");
const asked = { model, prompt: "Is it raining?", maxRetries: 0, seed: 1 };
const { text } = await generateText({ ...asked, maxOutputTokens: 8 });
let streamed = "";
for await (const part of streamText({ ...asked, maxOutputTokens: 8 }).textStream) streamed += part;
assert(text && streamed === text);
const schema = z.object({ city: z.enum(["Paris", "Rome"]) });
const { object } = await generateObject({ ...asked, schema });
assert(schema.parse(object));
const weather = tool({ description: "Tells the weather.", inputSchema: schema });
const { toolCalls } = await generateText({ ...asked, tools: { weather }, toolChoice: "required" });
assert(schema.parse(toolCalls[0].input));
