// Vercel's AI SDK: three turns with a tool that is run, through four providers, streamed and not, thinking and not.
// Not part of the test suite. With `python tests/support/check_turns.py serve 8123` running, in a folder with
// npm install ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic:
//   node check_turns.mjs http://127.0.0.1:8123
// Exits 1 if a turn fails. Last run on 2026-11-30 with ai 6.0.326 and providers 3.0.141, 2.0.92, 3.0.140: all pass.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const baseURL = process.argv[2] + "/v1", apiKey = "k";
const openai = createOpenAI({ baseURL, apiKey });
const models = {
  responses: openai("scripted"),
  chat: openai.chat("scripted"),
  compatible: createOpenAICompatible({ name: "local", baseURL, apiKey })("scripted"),
  anthropic: createAnthropic({ baseURL, apiKey })("scripted"),
};
const script = (reply) => `@${JSON.stringify({ reply })}@`;
const call = "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>";
const weather = (thinks) => tool({
  description: "Tells the weather.",
  inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
  execute: async ({ city }) => `rain in ${city} ${script((thinks ? "Hm.</think>" : "") + "It rains.")}`,
});
const providerOptions = {
  openai: { reasoningEffort: "high", reasoningSummary: "auto" },
  local: { reasoningEffort: "high" },
  anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } },
};

async function streamed(options) {
  const answer = streamText({ ...options, onError: () => {} });
  await answer.consumeStream();
  return { text: await answer.text, response: await answer.response };
}

let failures = 0;
for (const [name, model] of Object.entries(models)) {
  for (const thinks of [false, true]) {
    try {
      let messages = [{ role: "user", content: script(call) }];
      const fixed = { model, system: "Be nice.", tools: { weather: weather(thinks) }, stopWhen: stepCountIs(4) };
      for (let turn = 0; turn < 3; turn++) {
        const options = { ...fixed, messages, ...(thinks ? { providerOptions } : {}) };
        const answer = turn % 2 ? await generateText(options) : await streamed(options);
        // its Responses provider asks only models that it knows to think
        if (!answer.text.endsWith("It rains.")) throw new Error(`turn ${turn}: ${answer.text}`);
        messages = [...messages, ...answer.response.messages, { role: "user", content: script(call) }];
      }
      console.log(`${name}, thinking ${thinks}: ok`);
    } catch (error) {
      failures += 1;
      console.log(`${name}, thinking ${thinks}: FAILED ${error.message} ${error.responseBody ?? ""}`);
    }
  }
}
process.exit(failures ? 1 : 0);
