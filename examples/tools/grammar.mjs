// Conversations with calls of the three tools in tools.json, made by a small grammar from a seed.

const COLOURS = ['red', 'blue', 'green', 'black', 'white', 'brown', 'old', 'new'];
const THINGS = ['lamp', 'chair', 'clock', 'coat', 'hat', 'cup', 'boat', 'bike'];
const TOWNS = ['Oslo', 'Rome', 'Paris', 'Lima', 'Cairo', 'Tokyo', 'Delhi', 'Perth'];
const PEOPLE = ['Ann', 'Ben', 'Carl', 'Dora', 'Emma', 'Finn', 'Hans', 'Ida'];
const SKIES = ['sunny', 'cloudy', 'rainy', 'windy', 'foggy', 'snowy'];

/** How people ask. `*` stands for the thing, the town, or for both sides of a message. */
const ASK_PRICE = ['What does the * cost?', 'How much is the *?', 'I want to buy the *. What is its price?'];
const ASK_WEATHER = [
  'How is the weather in *?',
  'What is the weather in * now?',
  'I am going to *. How is the weather?',
];
const TELL_PRICE = ['Tell @ what the * costs.', 'Write to @ how much the * is.', 'Let @ know the price of the *.'];
const TELL_WEATHER = ['Tell @ how the weather in * is.', 'Write to @ about the weather in *.'];
const SMALL_TALK = [
  ['Hello', 'Hello! What can I do for you?'],
  ['Good morning', 'Good morning! What can I do for you?'],
  ['Thank you', 'You are welcome.'],
  ['Who are you?', 'I am a small model that calls tools.'],
];
const NO_TOOL = 'I have no tool for that.';

/** A generator of numbers in [0, 1) (mulberry32). */
export function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t = (t + Math.imul(t ^ (t >>> 7), t | 61)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** One of eight things is never in the training data: a model that finds its price has not learned the calls by heart. */
export function isHeldOut(thing) {
  const [colour, name] = thing.split(' ');
  return (COLOURS.indexOf(colour) + 3 * THINGS.indexOf(name)) % 8 === 0;
}

/** A wish of the user: the words, the calls that it takes with their results, and the answer. */
function randomWish(random, tools, heldOut) {
  const pick = (list) => list[Math.floor(random() * list.length)];
  const kind = random();
  if (kind < 0.06) {
    const [text, answer] = pick(SMALL_TALK);
    return { text, calls: [], answer };
  }
  const isPrice = random() < 0.55;
  const isTold = kind < 0.6;
  let about = pick(TOWNS);
  if (isPrice) {
    do about = `${pick(COLOURS)} ${pick(THINGS)}`;
    while (isHeldOut(about) !== heldOut);
  }
  const person = pick(PEOPLE);
  const [forms, toldForms] = isPrice ? [ASK_PRICE, TELL_PRICE] : [ASK_WEATHER, TELL_WEATHER];
  const text = pick(isTold ? toldForms : forms)
    .replace('*', about)
    .replace('@', person);
  const lookUp = isPrice ? price(about, number(random)) : weather(about, pick(SKIES), number(random));
  const calls = isTold
    ? [lookUp, { name: 'send_message', arguments: { to: person, text: lookUp.fact }, result: { sent: true } }]
    : [lookUp];
  // Only tools that are offered may be called.
  if (!calls.every(({ name }) => tools.some((tool) => tool.function.name === name)))
    return { text, calls: [], answer: NO_TOOL };
  return { text, calls, answer: isTold ? `I told ${person}: ${lookUp.fact}` : lookUp.fact };
}

/** A price or a temperature. Each number is one token. */
function number(random) {
  return 10 + Math.floor(random() * 20);
}

function price(thing, coins) {
  const fact = `The ${thing} costs ${coins} coins.`;
  return { name: 'find_price', arguments: { item: thing }, result: { price: coins }, fact };
}

function weather(town, sky, degrees) {
  const fact = `It is ${sky} in ${town}, ${degrees} degrees.`;
  return { name: 'find_weather', arguments: { town }, result: { sky, degrees }, fact };
}

/** A conversation as a line of `data.source: chat`, with the wishes in it. */
export function randomChat(
  random,
  tools,
  { heldOut = false, wishes = 1 + Math.floor(random() * 3), offersAll = false } = {},
) {
  const offered = [...tools].sort(() => random() - 0.5).slice(!offersAll && random() < 0.1 ? 1 : 0);
  const asked = Array.from({ length: wishes }, () => randomWish(random, offered, heldOut));
  const messages = asked.flatMap(({ text, calls, answer }) => [
    { role: 'user', content: text },
    ...calls.flatMap(({ name, arguments: values, result }) => [
      { role: 'assistant', content: null, tool_calls: [{ type: 'function', function: { name, arguments: values } }] },
      { role: 'tool', content: JSON.stringify(result) },
    ]),
    { role: 'assistant', content: answer },
  ]);
  return { chat: { tools: offered, messages }, wishes: asked };
}
