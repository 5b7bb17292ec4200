// An agent on OpenAI's package for Node, streaming. It knows a base URL and nothing of Flywheel.
// node openai_node.mjs BASE_URL RUNS — prints one final answer a line.
import OpenAI from "openai";

const [baseURL, runs] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const tools = [
  {
    type: "function",
    function: {
      name: "weather",
      description: "Get the weather in a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

async function run(question) {
  const messages = [{ role: "user", content: question }];
  for (let turn = 0; turn < 5; turn++) {
    const stream = client.chat.completions.stream({ model: "agent", messages, tools });
    const { message } = (await stream.finalChatCompletion()).choices[0];
    messages.push(message);
    if (!message.tool_calls?.length) break;
    for (const call of message.tool_calls) {
      const { city } = JSON.parse(call.function.arguments);
      messages.push({ role: "tool", tool_call_id: call.id, content: `${city}: sunny` });
    }
  }
  return messages.at(-1).content;
}

const answers = await Promise.all(Array.from({ length: Number(runs) }, () => run("What is the weather today?")));
console.log(answers.join("\n"));
