"""How the page looks, in light and in dark, on a wide and on a narrow screen."""

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c1e21; --soft: #5f6670; --line: #d9dce1;
  --card: #f4f5f7; --starting: #8fa8c8; --running: #79a7d6; --training: #3a9d5d;
  --frozen: #e0a526; --lost: #a765c9; --stopping: #9aa0a8; --fail: #d2232a; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --text: #e6e7e9; --soft: #9aa1ab;
  --line: #34383e; --card: #1f2226; --starting: #56708f; --running: #4a7db0; --training: #35834f;
  --frozen: #b98512; --lost: #8d51ad; --stopping: #6a7079; --fail: #ff5a5f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1100px; background: var(--page);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 8px; }
h3 { font-size: 15px; margin: 16px 0 4px; }
p { margin: 4px 0 8px; } .soft { color: var(--soft); font-size: 13px; }
code, pre { font: 12px/1.4 ui-monospace, monospace; }
pre { background: var(--card); padding: 8px; margin: 4px 0 12px; overflow-x: auto;
  white-space: pre; overflow-wrap: normal; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 8px;
  margin: 12px 0; }
.card { background: var(--card); border-radius: 6px; padding: 8px 10px; }
.card b { display: block; font-size: 18px; } .card span { color: var(--soft); font-size: 13px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: normal; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.cause { min-width: 200px; overflow-wrap: anywhere; } .when { white-space: nowrap; }
.lane { display: grid; grid-template-columns: minmax(56px, 11%) 1fr; gap: 8px;
  align-items: center; }
.lane span { font-size: 12px; color: var(--soft); text-align: right; }
.lane svg { height: 15px; } svg { display: block; width: 100%; }
.axis { display: flex; justify-content: space-between; font-size: 12px; color: var(--soft); }
.key { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 13px; margin: 6px 0; }
.key svg { width: 12px; height: 12px; display: inline-block; margin-right: 5px; }
.chart { border-left: 1px solid var(--line); border-bottom: 1px solid var(--line); height: 160px; }
.starting { fill: var(--starting); } .running { fill: var(--running); }
.training { fill: var(--training); } .frozen { fill: var(--frozen); } .lost { fill: var(--lost); }
.stopping { fill: var(--stopping); }
.fail { stroke: var(--fail); stroke-width: 2px; fill: none; vector-effect: non-scaling-stroke; }
.l { fill: none; stroke-width: 2px; vector-effect: non-scaling-stroke; }
.l0 { stroke: #3b82c4; } .l1 { stroke: #d9822b; } .l2 { stroke: #3a9d5d; } .l3 { stroke: #c8466a; }
.l4 { stroke: #8d6cc9; } .l5 { stroke: #8c6d4f; } .l6 { stroke: #2aa7a7; } .l7 { stroke: #8a8f98; }
"""
