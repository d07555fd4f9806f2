{{- define "tandem.secret" -}}{{ .Values.secrets.auth | default .Release.Name }}{{- end }}

{{- define "tandem.claim" -}}
{{ .Values.models.claim | default (ternary (printf "%s-models" .Release.Name) "" (gt (int .Values.models.sizeGiB) 0)) }}
{{- end }}

{{- define "tandem.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (ternary "cuda" "cpu" (gt (int .Values.gpu.perWorker) 0)) }}
{{- end }}

{{/* The memory of a worker in GiB: weights, KV pool (on a CPU) and 2 GiB for Python, PyTorch and Ray. */}}
{{- define "tandem.workerMemory" -}}
{{- $kv := ternary 0.0 (float64 .Values.model.kvCacheGiB) (gt (int .Values.gpu.perWorker) 0) -}}
{{ addf .Values.model.sizeGiB $kv 2 | ceil | int }}Gi
{{- end }}

{{- define "tandem.grows" -}}
{{- range .Values.workers }}{{ if gt (int .maxReplicas) (int .replicas) }}yes{{ end }}{{ end -}}
{{- end }}

{{/* Options of `tandem serve` that the values set, as environment variables. */}}
{{- define "tandem.options" -}}
{{- $options := dict "host" "0.0.0.0" "log-format" "json" "model" .Values.model.name }}
{{- if .Values.gpu.perWorker }}
{{- $_ := set $options "device" "cuda" }}
{{- else }}
{{- $_ := set $options "kv-cache-memory-bytes" (mulf .Values.model.kvCacheGiB 1073741824 | int64) }}
{{- end }}
{{- $ranges := list }}
{{- range $role, $group := .Values.workers }}
{{- if $group.replicas }}
{{- $_ := set $options (printf "%s-replicas" $role) $group.replicas }}
{{- if gt (int $group.maxReplicas) (int $group.replicas) }}
{{- $ranges = append $ranges (printf "%s=%d:%d" $role (int $group.replicas) (int $group.maxReplicas)) }}
{{- end }}
{{- end }}
{{- end }}
{{- if $ranges }}{{ $_ := set $options "autoscale" (join "," $ranges) }}{{ end }}
{{- if not .Values.workers.prefill.replicas }}{{ $_ := set $options "disaggregation" false }}{{ end }}
{{- range $flag, $value := merge (deepCopy .Values.options) $options }}
- name: TANDEM_{{ $flag | upper | replace "-" "_" }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- end }}

{{/* Environment of all pods. */}}
{{- define "tandem.environment" -}}
- {name: RAY_AUTH_MODE, value: token}
- {name: RAY_AUTH_TOKEN_PATH, value: /cluster/auth_token}
{{- if include "tandem.claim" . }}
- {name: HF_HOME, value: /models/hub}
{{- if and .Values.models.keepsKernels (not .Values.models.readOnly) }}
- {name: TANDEM_CACHE_DIR, value: /models/cache/tandem}
- {name: TRITON_CACHE_DIR, value: /models/cache/triton}
{{- end }}
{{- end }}
{{- with .Values.secrets.huggingFace }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: token}
{{- end }}
{{- end }}

{{- define "tandem.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "tandem.mounts" -}}
- {name: cluster, mountPath: /cluster, readOnly: true}
- {name: home, mountPath: /home/tandem}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if include "tandem.claim" . }}
- {name: models, mountPath: /models, readOnly: {{ .Values.models.readOnly }}}
{{- end }}
{{- end }}

{{/* The common part of all roles' pods; .group has the values of the pod's role. */}}
{{- define "tandem.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
terminationGracePeriodSeconds: 40
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .group.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: cluster
    secret:
      secretName: {{ include "tandem.secret" . }}
      defaultMode: 0440
      items:
        - {key: auth_token, path: auth_token}
  - name: home # includes compiled kernels, unless the models' claim keeps them
    emptyDir: {}
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ .Values.shmGiB }}Gi}
  {{- with include "tandem.claim" . }}
  - name: models
    persistentVolumeClaim: {claimName: {{ . }}, readOnly: {{ $.Values.models.readOnly }}}
  {{- end }}
{{- end }}
