const packed = document.getElementById("plotly").textContent;
const unpacked = (async () => {
  const bytes = Uint8Array.from(atob(packed), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
})();
unpacked.catch(() => document.body.prepend(packed ? "The pictures of this page need a browser of 2023 or later." : "Tables alone: pip install plotly draws the pictures."));
