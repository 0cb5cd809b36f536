// The plain `openai` client of Node: three turns of one history over chat (its runTools) and Responses, whole and streamed.
import OpenAI from 'openai'

const data = JSON.parse(process.env.DATA)
const client = new OpenAI({ baseURL: data.url, apiKey: 'k', maxRetries: 0 })
let ran = []
const properties = { read_file: { path: { type: 'string' } }, add: { a: { type: 'integer' }, b: { type: 'integer' } }, reboot: { when: { type: 'string' } } }
const results = { read_file: data.file, add: data.sum, reboot: 'rebooted' }
const run = (name, input) => (ran.push([name, input]), results[name])
const described = (name) => ({
  name,
  description: 'Does it',
  parameters: { type: 'object', properties: properties[name], required: name === 'reboot' ? [] : Object.keys(properties[name]) },
})
const runnable = (name) => ({ type: 'function', function: { ...described(name), parse: JSON.parse, function: (input) => run(name, input) } })

async function chat(history, names, stream, limit) {
  const runner = client.chat.completions.runTools({ model: 'scripted', messages: history, tools: names.map(runnable), stream, max_tokens: limit })
  await runner.done()
  return [runner.messages, await runner.finalContent()]
}

async function responses(history, names, stream, limit) {
  const tools = names.map((name) => ({ type: 'function', strict: false, ...described(name) }))
  for (;;) {
    const fields = { model: 'scripted', input: history, tools, max_output_tokens: limit }
    const answer = stream ? await client.responses.stream(fields).finalResponse() : await client.responses.create(fields)
    history = [...history, ...answer.output]
    const calls = answer.output.filter((item) => item.type === 'function_call')
    if (!calls.length) return [history, answer.output_text]
    for (const { call_id, name, arguments: text } of calls)
      history.push({ type: 'function_call_output', call_id, output: run(name, JSON.parse(text)) })
  }
}

for (const api of [chat, responses]) {
  for (const stream of [false, true]) {
    const name = `${api.name} ${stream ? 'streamed' : 'whole'}`
    let history = [], final
    ran = []
    for (let turn = 0; turn < 3; turn++)
      [history, final] = await api([...history, { role: 'user', content: data.prompt }], ['read_file', 'add'], stream)
    console.log(JSON.stringify([`${name} turns`, ran, final]))
    for (const limit of data.limits) {
      ran = []
      // that an answer was cut may be told as an error
      await api([{ role: 'user', content: data.cut_prompt }], ['reboot'], stream, limit).catch((error) => {
        if (error.status) throw error
      })
      console.log(JSON.stringify([`${name} cut at ${limit}`, ran, null]))
    }
  }
}
