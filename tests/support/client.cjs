// OpenAI's own Node client, unmodified: chat and responses, whole and streamed, a tool's call and result, a refusal.
// Usage: NODE_PATH=.../node_modules node client.cjs BASE_URL; prints one JSON object of what came back.
const OpenAI = require("openai");
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0 });
const prompt = (script) => `@${JSON.stringify({ runs: [3, 1], ...script })}@`;
const call = "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>";
const parameters = { type: "object", properties: { city: { type: "string" } } };
const model = "scripted";

async function chat() {
  const tools = [{ type: "function", function: { name: "weather", parameters } }];
  const messages = [{ role: "user", content: prompt({ reply: `I look.\n${call}` }) }];
  const whole = await client.chat.completions.create({ model, messages, tools });
  let text = "", usage = null, args = "";
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ model, messages, tools, ...options })) {
    text += chunk.choices[0]?.delta?.content ?? "";
    args += chunk.choices[0]?.delta?.tool_calls?.[0]?.function?.arguments ?? "";
    usage = chunk.usage ?? usage;
  }
  const [made] = whole.choices[0].message.tool_calls;
  messages.push(whole.choices[0].message, { role: "tool", tool_call_id: made.id, content: "rain" });
  messages.push({ role: "user", content: prompt({ reply: "Rain €." }) });
  const after = await client.chat.completions.create({ model, messages, tools });
  return { whole: whole.choices[0].message.content, args: [made.function.arguments, args], text,
    same: usage.completion_tokens === whole.usage.completion_tokens, after: after.choices[0].message.content };
}

async function responses() {
  const tools = [{ type: "function", name: "weather", parameters, strict: false }];
  const input = [{ role: "user", content: prompt({ reply: `I look.\n${call}` }) }];
  const whole = await client.responses.create({ model, input, tools });
  const stream = client.responses.stream({ model, input, tools });
  const types = new Set();
  for await (const event of stream) types.add(event.type);
  const streamed = await stream.finalResponse();
  const made = whole.output.find((item) => item.type === "function_call");
  input.push(...whole.output, { type: "function_call_output", call_id: made.call_id, output: "rain" });
  input.push({ role: "user", content: prompt({ reply: "Rain €." }) });
  const after = await client.responses.create({ model, input, tools });
  return { whole: whole.output_text, streamed: streamed.output_text, args: made.arguments, after: after.output_text,
    completed: types.has("response.completed") };
}

async function refusal() {
  try {
    await client.chat.completions.create({ model, messages: [{ role: "user", content: "x" }], temperature: 3 });
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, param: error.param };
  }
}

(async () => {
  const models = (await client.models.list()).data.map((entry) => entry.id);
  console.log(JSON.stringify({ models, chat: await chat(), responses: await responses(), refusal: await refusal() }));
})();
