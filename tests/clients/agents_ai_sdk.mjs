// Vercel's AI SDK: a loop of three turns over chat and Responses, whole and streamed.
import { generateText, streamText, stepCountIs, tool, Output } from 'ai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { createOpenAI } from '@ai-sdk/openai'
import { z } from 'zod'

const data = JSON.parse(process.env.DATA)
let ran = []
const readFile = tool({
  description: 'Reads a file',
  inputSchema: z.object({ path: z.string() }),
  execute: async (input) => (ran.push(['read_file', input]), input.path === 'a.txt' ? data.file : data.typed),
})
const add = tool({
  description: 'Adds',
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async (input) => (ran.push(['add', input]), data.sum),
})
const reboot = tool({
  description: 'Reboots',
  inputSchema: z.object({ when: z.string().optional() }),
  execute: async (input) => (ran.push(['reboot', input]), 'rebooted'),
})
const models = {
  chat: createOpenAICompatible({ name: 'local', baseURL: data.url, apiKey: 'k', supportsStructuredOutputs: true })('scripted'),
  responses: createOpenAI({ baseURL: data.url, apiKey: 'k' }).responses('scripted'),
}
for (const [kind, model] of Object.entries(models)) {
  for (const stream of [false, true]) {
    const run = async (fields) => {
      ran = []
      const asked = { model, stopWhen: stepCountIs(5), maxRetries: 0, ...fields }
      if (!stream) return await generateText(asked)
      const result = streamText({ ...asked, onError: ({ error }) => { throw error } })
      for await (const _ of result.fullStream) { /* to its end */ }
      return { text: await result.text, output: fields.output ? await result.output : undefined }
    }
    const name = `${kind} ${stream ? 'streamed' : 'whole'}`
    const answer = await run({ prompt: data.prompt, tools: { read_file: readFile, add } })
    console.log(JSON.stringify([name, ran, answer.text]))
    const output = Output.object({ schema: z.object({ total: z.number() }) })
    const typed = await run({ prompt: data.typed_prompt, tools: { read_file: readFile, add }, output })
    console.log(JSON.stringify([`${name} typed`, ran, JSON.stringify(typed.output)]))
    for (const limit of data.limits) {
      await run({ prompt: data.cut_prompt, tools: { reboot }, maxOutputTokens: limit })
      console.log(JSON.stringify([`${name} cut at ${limit}`, ran, null]))
    }
  }
}
