"""What a shell reads to complete ``msrun``; each asks ``msrun completion words`` at a key press."""

from __future__ import annotations

_BASH = r"""# eval "$(msrun completion bash)"
_msrun() {
    local IFS=$'\n' each typed=${COMP_WORDS[COMP_CWORD]} words=("${COMP_WORDS[@]:1:COMP_CWORD}")
    COMPREPLY=()
    for each in $("${COMP_WORDS[0]}" completion words -- "${words[@]}" 2>/dev/null); do
        # bash takes what follows an = for a word of its own
        if [[ $typed == = || ${COMP_WORDS[COMP_CWORD-1]} == = ]]; then each=${each#*=}; fi
        printf -v each %q "$each"
        COMPREPLY+=("$each")
    done
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == */ ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -F _msrun msrun
"""
_ZSH = r"""#compdef msrun
# eval "$(msrun completion zsh)", after compinit
_msrun() {
    local -a found
    found=("${(@f)$("${words[1]}" completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    found=(${found:#})
    compadd -S '' -- ${(M)found:#*/}
    compadd -- ${found:#*/}
}
if (( $+functions[compdef] )); then compdef _msrun msrun; fi
"""
_FISH = r"""# msrun completion fish | source
function __msrun_words
    set -l before (commandline -opc)
    set -l program $before[1]
    set -e before[1]
    $program completion words -- $before (commandline -ct) 2>/dev/null
end
complete -c msrun -f -a '(__msrun_words)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
