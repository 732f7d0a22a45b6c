// Draws the Mermaid blocks of a page; without a network their source stays readable.
import mermaid from "https://cdn.jsdelivr.net/npm/mermaid@11/dist/mermaid.esm.min.mjs";

for (const source of document.querySelectorAll("code.language-mermaid")) {
  source.parentElement.outerHTML = `<div class="mermaid">${source.innerHTML}</div>`;
}
mermaid.initialize({ startOnLoad: false });
await mermaid.run({ querySelector: ".mermaid" });
