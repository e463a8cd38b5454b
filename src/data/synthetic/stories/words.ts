/** The words and sentences of the story grammar (grammar.ts). Every string here is our own. */

/** A character of a story. */
export interface Character {
  readonly name: string;
  readonly animal: string;
  readonly pronoun: 'he' | 'she';
}

const character = (name: string, animal: string, pronoun: 'he' | 'she'): Character => ({ name, animal, pronoun });

export const CHARACTERS: readonly Character[] = [
  character('Pip', 'fox', 'he'),
  character('Olga', 'owl', 'she'),
  character('Bruno', 'bear', 'he'),
  character('Mia', 'mouse', 'she'),
  character('Tom', 'toad', 'he'),
  character('Rosa', 'rabbit', 'she'),
  character('Hugo', 'hedgehog', 'he'),
  character('Nell', 'newt', 'she'),
  character('Otto', 'otter', 'he'),
  character('Dora', 'duck', 'she'),
  character('Finn', 'frog', 'he'),
  character('Bella', 'badger', 'she'),
];

/** The hidden things. The noun is the key of a fact: it occurs in no other sentence of the grammar. */
export const THINGS: readonly string[] = [
  ...['red kite', 'silver spoon', 'tin drum', 'old compass', 'paper crown', 'green teapot'],
];

/** Where it is hidden: always a preposition, `the` and a noun that occurs in no other sentence. */
export const PLACES: readonly string[] = [
  ...['under the bridge', 'under the stairs', 'behind the barn', 'in the cave', 'in the attic', 'beside the pond'],
];

/**
 * Slots: `{a}` `{b}` `{c}` are the names of the three friends, `{a animal}` `{a he}` `{a His}` describe one of them, and
 * `{x|y|z}` is a free choice.
 */
export const OPENINGS: readonly string[] = [
  'Once upon a time there was a {small|kind|clever|sleepy|brave} {a animal} named {a}. {a He} lived in a {house|nest|hut|boat} {near the sea|on a hill|at the edge of the wood}. One {sunny|windy|foggy|snowy} morning two friends came to visit, {b} the {b animal} and {c} the {c animal}.',
  'Far away, {near the sea|on a hill|at the edge of the wood}, lived a {small|kind|clever|sleepy|brave} {a animal} called {a}. {a His} best friends were {b} the {b animal} and {c} the {c animal}. On a {sunny|windy|foggy|snowy} day the three of them had nothing to do.',
  'This is the story of {a} the {a animal}, {b} the {b animal} and {c} the {c animal}. They were good friends and they shared a {house|nest|hut|boat} {near the sea|on a hill|at the edge of the wood}. It all began on a {sunny|windy|foggy|snowy} morning after breakfast.',
];

/** Said before a group of facts. */
export const HIDINGS: readonly string[] = [
  '"Let us play a game," said {a}. "We hide things, and later we must remember where they are."',
  '"I know a game," said {b}. "Everybody hides something, and nobody may forget it."',
  '{c} had an idea. "Let us hide some treasures," {c} said, "and find them again before the night."',
];

export const HIDINGS_AGAIN: readonly string[] = [
  'The game was so much fun that they hid more things.',
  '"Once more!" cried {b}, and so they played on.',
  'They were not tired yet, so they hid a few more treasures.',
];

/** One fact: {who} hides a thing in a place. {fact} begins with a space. */
export const FACTS: readonly string[] = [
  '{who} {hid|put|left}{fact}.',
  'Then {who} {hid|put|left}{fact}.',
  '{who} quickly {hid|put|left}{fact}.',
];

/** Said before a fact is recalled. */
export const REMINDERS: readonly string[] = [
  '{a} thought for a moment.',
  '"I remember!" said {b}.',
  'Then {c} looked everywhere.',
  '"Who can find the next one?" asked {a}.',
  '{b} closed {b his} eyes.',
  'Nobody had forgotten it.',
];

/** Events between facts and recalls. No sentence names a thing or a place. */
export const SCENES: readonly string[] = [
  'It began to rain. {a} opened {a his} mouth and tasted the drops. "They taste like {clouds|lemonade|tea}," {a he} said, and everybody laughed.',
  'A {bee|butterfly|beetle} landed on the nose of {b}. Nobody moved. "Hello," whispered {b}, and it flew away.',
  'They were hungry now, so {c} baked a {plum|cherry|carrot|pumpkin} cake. It was too hot, and they had to wait. {a} waited the least.',
  'The wind blew and blew. It took the hat of {b} and carried it over the hill. "Come back!" shouted {b}, but hats do not listen.',
  'They sang a song about a {snail|moon|king} that was {late for dinner|afraid of soup|very much in love}. {c} sang the loudest and knew the fewest words.',
  '{a} counted the clouds. There were {two|three|five|seven}. {b} counted too, but {b} always began again at one.',
  'They sat in the grass and told jokes. The joke of {c} was so long that {a} fell asleep in the middle of it.',
  'Suddenly there was a strange noise. "A monster!" cried {c}. But it was only the belly of {a}, asking for {soup|bread|honey}.',
  '{b} tried to stand on one leg. {b He} fell over {two|three|five|seven} times, and then {b he} called it dancing.',
  'An old {snail|goose|goat} came down the road with a letter. "Is this for me?" asked {a}. It was for the moon, so they sent it on with the wind.',
  'They built a boat of leaves and let it swim. It sailed very well for a moment. Then it became a submarine.',
  '{a} and {c} had a race to the big tree. {a} ran fast and {c} ran far, so both of them won.',
  'The sun came out, and they lay down to dry. {b} said that clouds are sheep that nobody has to feed. That seemed right.',
  'Lunch was {soup|bread|honey} with {plums|cherries|carrots}. {a} ate {two|three|five|seven} bowls and said that {a he} was only being polite.',
  '{c} painted a picture of the three friends. It looked like {two|three|five|seven} potatoes, but they were happy potatoes.',
  'A {king|wizard|sailor} walked by and asked for the way. "Left, then right, then ask again," said {b}. The stranger bowed and went on.',
  'They heard the {bells|frogs|geese} far away. {a} listened with closed eyes. "They are singing about us," {a he} said softly.',
  '"What is the best thing in the world?" asked {c}. "Soup," said {a}. "Friends," said {b}. "Friends with soup," said {c}.',
  '{b} found a stone that looked like a potato, and {a} found a potato that looked like a stone. They swapped.',
  'For a while nobody spoke. The leaves danced, the grass hummed, and the day was as slow as a snail on holiday.',
];

export const CLOSINGS: readonly string[] = [
  'Then the stars came out, and the three friends went home. What a day! The end.',
  'When the moon was high, they were all asleep, and {a} was smiling. The end.',
  '"Tomorrow we play again," said {a}, and that is just what they did. The end.',
  'They drank warm milk together and said good night. The end.',
];
