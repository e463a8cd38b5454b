// An agent of the AI SDK on a served model: for every question the model calls tools until it can answer.
//
//   npm install ai@6 @ai-sdk/openai-compatible@2
//   node agent.mjs [--url http://127.0.0.1:8080/v1] [--rounds 1] [--seed 1]
//
// Each round is a conversation of three questions that are drawn from the seed: about things and towns, and requests to tell a
// person, which take two calls and so three answers of the model. Exits with 1 unless all answers are right.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, jsonSchema, stepCountIs, tool } from 'ai';
import { randomChat, randomNumbers } from './grammar.mjs';

const { values } = parseArgs({
  options: {
    url: { type: 'string', default: 'http://127.0.0.1:8080/v1' },
    rounds: { type: 'string', default: '1' },
    seed: { type: 'string', default: '1' },
  },
});
const definitions = JSON.parse(readFileSync(join(import.meta.dirname, 'tools.json'), 'utf8'));
const { data } = await (await fetch(`${values.url}/models`)).json();
const model = createOpenAICompatible({ name: 'trefoil', baseURL: values.url })(data[0].id);
const random = randomNumbers(1000 + Number(values.seed));
let [right, asked, steps] = [0, 0, 0];

for (let round = 0; round < Number(values.rounds); round++) {
  const messages = [];
  // Things that the training never showed.
  const { wishes } = draw();
  for (const { text, calls, answer } of wishes) {
    console.log(`\nuser: ${text}`);
    messages.push({ role: 'user', content: text });
    const made = [];
    const result = await generateText({
      model,
      messages,
      temperature: 0,
      maxOutputTokens: 150,
      tools: toolsFor(calls, made),
      stopWhen: stepCountIs(6),
    });
    messages.push(...result.response.messages);
    const isRight = result.text.trim() === answer && JSON.stringify(made) === JSON.stringify(calls.map(callOf));
    console.log(`assistant: ${result.text}${isRight ? '' : `   (wrong, it should be: ${answer})`}`);
    right += isRight ? 1 : 0;
    asked += 1;
    steps += result.steps.length;
  }
}
console.log(`\n${right} of ${asked} answers are right, after ${steps} answers of the model`);
process.exitCode = right === asked ? 0 : 1;

function draw() {
  for (;;) {
    const chat = randomChat(random, definitions, { heldOut: true, wishes: 3, offersAll: true });
    if (chat.wishes.every(({ calls }) => calls.length > 0)) return chat; // no small talk
  }
}

function callOf({ name, arguments: input }) {
  return { name, input };
}

/** The tools of tools.json. A call that the question does not need finds nothing. */
function toolsFor(calls, made) {
  const act = (name) => (input) => {
    made.push({ name, input });
    const expected = calls.find((call) => JSON.stringify(callOf(call)) === JSON.stringify({ name, input }));
    // A message reaches any person.
    const output = expected?.result ?? (name === 'send_message' ? { sent: true } : { error: 'not found' });
    console.log(`  ${name}(${JSON.stringify(input)}) = ${JSON.stringify(output)}`);
    return output;
  };
  return Object.fromEntries(
    definitions.map(({ function: { name, description, parameters } }) => [
      name,
      tool({ description, inputSchema: jsonSchema(parameters), execute: act(name) }),
    ]),
  );
}
