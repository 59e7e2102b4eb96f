{{- /* The pod of a learner. Its folder is $(SHOAL_DIRECTORY). Change: values.yaml. */}}
{{- define "shoal.queue" -}}
{{- with .Values.queue -}}
labels: {kueue.x-k8s.io/queue-name: {{ . }}}
{{- end }}
{{- end }}

{{- define "shoal.pod" -}}
terminationGracePeriodSeconds: {{ add .Values.patience 30 }}
securityContext: {runAsNonRoot: true, runAsUser: 7700, fsGroup: 7700}
{{- with .Values.limits }}
initContainers:
  - name: limits
    image: {{ $.Values.image }}
    command: [sh, -c, 'mkdir -p "$SHOAL_DIRECTORY" && shoal limits --directory "$SHOAL_DIRECTORY" "$@"', limits]
    args: [{{ range $name, $value := . }}"--{{ $name }}={{ $value }}", {{ end }}]
    env:
      {{- include "shoal.env" $ | nindent 6 }}
    volumeMounts: [{name: data, mountPath: /data}]
{{- end }}
containers:
  - name: learner
    image: {{ .Values.image }}
    args: [join, --plain]
    env:
      {{- include "shoal.env" . | nindent 6 }}
    resources:
      requests: {cpu: {{ .Values.cpu | quote }}, memory: {{ .Values.memory }}}
      limits: {memory: {{ .Values.memory }}{{ if .Values.gpu }}, nvidia.com/gpu: {{ .Values.gpu | quote }}{{ end }}}
    volumeMounts: [{name: data, mountPath: /data}]
{{- end }}

{{- define "shoal.env" -}}
{{- if .Values.ends -}}
- name: INDEX
  valueFrom:
    fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
{{ end -}}
- name: SHOAL_LINK
  valueFrom: {secretKeyRef: {name: {{ .Release.Name }}, key: link}}
- {name: SHOAL_YES, value: "1"}
- {name: SHOAL_DIRECTORY, value: {{ if .Values.ends }}/data/$(INDEX){{ else }}/data/peer{{ end }}}
- {name: SHOAL_PATIENCE, value: {{ .Values.patience | quote }}}
{{- end }}
