// `openai` for JavaScript: chats, streams, tools and responses.
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Is it raining?" }];
const asked = { model: "model", messages, max_tokens: 8, seed: 1 };
const text = (await client.chat.completions.create(asked)).choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
    streamed += chunk.choices[0].delta.content ?? "";
}
assert(text && streamed === text);
const properties = { city: { type: "string", enum: ["Paris", "Rome"] } };
const parameters = { type: "object", required: ["city"], additionalProperties: false, properties };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const called = await client.chat.completions.create({ model: "model", messages, tools, tool_choice: "required" });
assert(["Paris", "Rome"].includes(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city));
const response = await client.responses.create({ model: "model", input: "Hello", max_output_tokens: 8 });
assert(response.output_text);
