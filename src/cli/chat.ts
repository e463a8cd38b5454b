/** `trefoil chat`: a conversation with a chat model. */
export { configureChat as configure } from './generate.js';
